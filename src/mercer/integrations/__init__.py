"""Mercer inside other people's models. Each file needs its library; `import mercer` needs none."""
