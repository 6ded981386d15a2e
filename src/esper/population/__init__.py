"""The bodies: hosts, blueprints and N members trained as one program."""
