"""State of the requests on a worker: their records, compiled walks, stream buffers and values. It sends nothing."""
