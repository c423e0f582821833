package console

import (
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// cleanLines applies termtext.Line to each line of s, and keeps the indentation.
func cleanLines(s string) []string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		indent := len(l) - len(strings.TrimLeft(l, " "))
		lines[i] = l[:indent] + termtext.Line(l)
	}
	return lines
}

// fit truncates s to a width in terminal cells.
func fit(s string, width int) string { return ansi.Truncate(s, max(width, 0), "…") }

// cells returns the width of s in terminal cells.
func cells(s string) int { return ansi.StringWidth(s) }
