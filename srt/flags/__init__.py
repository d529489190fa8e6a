"""The flags and keywords of SGLang and vLLM: each does its work or is refused with the reason."""
