"""Endpoints of embedding models and of scores: `/v1/embeddings`, `/v1/score`, `/v1/rerank`."""
