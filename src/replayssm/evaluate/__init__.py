"""What a precision costs: models run over given text with their states kept in several ways, and compared with fp32."""
