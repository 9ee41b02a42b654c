"""Models that run through transformers' own code, over pdserve's KV pools."""
