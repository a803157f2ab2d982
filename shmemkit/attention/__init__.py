"""Attention whose KV cache is spread over the ranks."""
