"""Parts of `mstarctl call`: the request, the output of the answer, timing and its report."""
