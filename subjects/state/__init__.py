"""The grammar of saved state: reading, writing, naming, changing and comparing blobs of llama.cpp."""
