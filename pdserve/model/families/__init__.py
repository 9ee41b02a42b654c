"""Model families. Today one: the generic grouped-query decoder with options, dense or with experts."""
