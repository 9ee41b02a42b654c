"""Rules of the HTTP servers, without a web framework: server and router adapt them to theirs."""
