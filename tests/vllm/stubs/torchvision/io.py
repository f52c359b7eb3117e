"""Names that image processors import."""

ImageReadMode = decode_image = None
