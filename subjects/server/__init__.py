"""llama-server as a subject: what its programs are, how it is built, started, asked and ended, and what it answered."""
