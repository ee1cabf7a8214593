"""The product: peers that train one model together. See trainer/README.md."""
