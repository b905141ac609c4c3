"""How we know that llama-server answered wrongly: every answer against that of a server that keeps nothing."""
