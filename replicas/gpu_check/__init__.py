"""`make gpu-check`: is the GPU path right, and how fast is it? Without Ray, with random weights only.

Needs torch, transformers, msgspec and numpy; flash-attn when it is to be checked.
"""
