"""The declaration of a model's graph: nodes, edges, streams and walks as data."""
