"""The KV cache: its blocks and their prefixes, blocks offloaded to the host, and the connector that moves them."""
