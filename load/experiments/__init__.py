"""The classic claims about LLM serving, one command each, measured on the machine at hand."""
