"""The application: command line, roles, HTTP port and the demo."""
