"""Web page of a deployment: its static files and its view of the supervisor. Served by `routes.console`."""
