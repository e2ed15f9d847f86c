"""Live view of a deployment: data, drawing, layouts and the few Textual widgets."""
