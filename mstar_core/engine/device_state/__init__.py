"""Device state of a KV node between steps: slots, values of resident loops, saved pages. Owned by its runner."""
