"""Programs with speculative drivers: what is generated, what their callers owe, and what is known of them."""
