"""Agent of a deployment on another host than the supervisor's: starts processes there and reports about them."""
