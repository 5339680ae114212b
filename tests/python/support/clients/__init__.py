"""Who talks to a server or a program: HTTP as bytes, browsers, terminals, clients of others."""
