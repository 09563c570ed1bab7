"""The sampler: jitted programs, and the engine that feeds them."""
