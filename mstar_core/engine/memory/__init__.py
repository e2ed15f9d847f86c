"""Memory of nodes that sleep: given back to the device, and taken again under the same addresses or storages."""
