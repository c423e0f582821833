package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of names of artifacts, which every file system of a host takes.
const (
	maxElement      = 255  // bytes between slashes
	MaxArtifactName = 4000 // bytes
)

// EscapeName is a path of a guest, any bytes, as a name that a host can have
// and a person can read: what is not printable UTF-8 is %XX for each byte, and
// so is %, so that url.PathUnescape has the path again. Only what is then longer
// than a file system takes is cut, and ends with ~ and a checksum of it all.
func EscapeName(raw string) string {
	elements := strings.Split(raw, "/")
	for i, e := range elements {
		elements[i] = escapeElement(e)
	}
	return strings.Join(elements, "/")
}

func escapeElement(raw string) string {
	var b strings.Builder
	cut := 0 // where it can be cut
	const hash = 16
	for i := 0; i < len(raw); {
		r, n := utf8.DecodeRuneInString(raw[i:])
		if r == '%' || r == utf8.RuneError && n <= 1 || !unicode.IsPrint(r) {
			for _, c := range []byte(raw[i : i+n]) {
				fmt.Fprintf(&b, "%%%02X", c)
			}
		} else {
			b.WriteString(raw[i : i+n])
		}
		i += n
		if b.Len() <= maxElement-hash-1 {
			cut = b.Len()
		}
	}
	if b.Len() <= maxElement {
		return b.String()
	}
	sum := sha256.Sum256([]byte(raw))
	return b.String()[:cut] + "~" + hex.EncodeToString(sum[:])[:hash]
}

// CheckArtifactName says whether a name that came from a guest may be that of a
// file on the host.
func CheckArtifactName(name string) error {
	bad := func(why string) error { return fmt.Errorf("the name %q %s", short(name, maxName), why) }
	if name == "" || len(name) > MaxArtifactName {
		return bad("is empty or too long")
	}
	for e := range strings.SplitSeq(name, "/") {
		switch {
		case e == "" || e == "." || e == "..":
			return bad("is not that of a file below its directory")
		case len(e) > maxElement:
			return bad("is too long")
		}
	}
	for i, r := range name {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(name[i:], "\ufffd"):
			return bad("is not UTF-8")
		case !unicode.IsPrint(r):
			return bad("holds what cannot be printed")
		case r == '%' && !escaped(name[i+1:]):
			return bad("has a % that escapes nothing")
		}
	}
	return nil
}

// escaped reports whether s begins with two digits as EscapeName writes them.
func escaped(s string) bool {
	return len(s) >= 2 && strings.Trim(s[:2], "0123456789ABCDEF") == ""
}
