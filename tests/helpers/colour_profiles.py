"""Small colour profiles, made as the ICC specifies them (ICC.1:2022): matrix and curve, grey curve."""

import struct

D50 = (0.9642, 1.0, 0.8249)
# (X, Y, Z) of Display P3's red, green and blue, adapted to D50
PRIMARIES = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))


def fixed(*values):
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def profile(kind, space, pcs, tags):
    head = struct.pack(">I4s4s4s12x4s28x", 0x04200000, kind, space, pcs, b"acsp") + fixed(*D50) + bytes(48)
    listed = struct.pack(">I", len(tags))
    body = b""
    begin = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        listed += struct.pack(">4sII", name, begin + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    return struct.pack(">I4x", begin + len(body)) + head + listed + body


SRGB_CURVE = struct.pack(">4s4xH2x", b"para", 3) + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
LINEAR = struct.pack(">4s4xIH", b"curv", 1, 256)
COLOURS = {b"%cXYZ" % c: b"XYZ " + bytes(4) + fixed(*xyz) for c, xyz in zip(b"rgb", PRIMARIES)}
DISPLAY_P3 = profile(b"mntr", b"RGB ", b"XYZ ", COLOURS | {b"%cTRC" % c: SRGB_CURVE for c in b"rgb"})
LINEAR_GREY = profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": LINEAR})
