"""Tasks and scores: is the text of speculative decoding as good as that of plain decoding, beyond noise?"""
