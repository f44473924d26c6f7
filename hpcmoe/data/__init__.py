"""Corpora, tokenizers and the resumable loader. Pure functions of files, seed and position; knows no ranks' communication."""
