"""Names that image processors import."""

pil_to_tensor = None
