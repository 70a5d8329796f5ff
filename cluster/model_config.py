"""placeholder: written by the model helper"""
