package picture

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestSVG(t *testing.T) {
	svg := SVG("a <title>", "plain \x1b[1;31mred & bold\x1b[0m \x1b[7mreversed\x1b[27m\n\x1b[38;5;236;48:2:1:2:3mdeep\x1b[m\x1b]0;no\a 日本 end\n\n", 40)
	for _, want := range []string{
		`aria-label="a &lt;title&gt;"`,
		`fill="#f7768e" font-weight="bold">red &amp; bold</text>`,
		`<rect x="156.8" y="30" width="67.2" height="18" fill="#c0caf5"/>`, // 17 cells from the margin, 8 cells wide
		`fill="#303030">deep</text>`, `fill="#010203"/>`,
		`textLength="75.6" lengthAdjust="spacingAndGlyphs" fill="#c0caf5"> 日本 end</text>`, // two cells for each wide character
	} {
		if !strings.Contains(svg, want) {
			t.Errorf("SVG = %s, want %s in it", svg, want)
		}
	}
	checkXML(t, svg)
}

// checkXML checks that a picture is well-formed.
func checkXML(t *testing.T, svg string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
