"""Text of answers: content, thinking and tool calls, for every route that returns them."""
