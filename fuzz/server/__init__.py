"""Programs for llama-server: what is generated, what they must keep to, and how they are made smaller."""
