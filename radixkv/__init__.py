"""radixkv"""
