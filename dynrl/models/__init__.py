"""The decoder, its sharding rules, and tokenizers."""
