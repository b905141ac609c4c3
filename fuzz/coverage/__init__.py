"""How much of llama.cpp's state code our programs reach: profiles, branches, the list of functions, tables, pages."""
