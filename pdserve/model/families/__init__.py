"""Model families. Today one: the generic grouped-query decoder, dense or with experts."""
