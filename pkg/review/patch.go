package review

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// Limits of a file whose lines can be chosen. A larger one lands as a whole.
const (
	maxShown = 4 << 20  // bytes of each version
	maxLine  = 64 << 10 // bytes of a line
	sniffed  = 8000     // bytes in which a NUL makes a file binary, as for git
)

// old returns the file as it landed or was at the start.
func (f File) old() repo.Entry { return repo.Entry{Mode: f.OldMode, ID: f.OldID} }

// new returns the file as the agent has it.
func (f File) new() repo.Entry { return repo.Entry{Mode: f.NewMode, ID: f.NewID} }

// oldPath returns the path of the old version.
func (f File) oldPath() string {
	if f.OldPath != "" {
		return f.OldPath
	}
	return f.Path
}

// readPatch compares the two versions of a file.
func readPatch(ctx context.Context, t *repo.Trees, f File) (*Patch, error) {
	p := &Patch{File: f}
	if p.Whole = wholeReason(f); p.Whole != "" {
		p.Meta = f.wholeKey()
		return p, nil
	}
	var text [2]string
	for i, e := range []repo.Entry{f.old(), f.new()} {
		if e == (repo.Entry{}) {
			continue
		}
		content, size, err := t.Blob(ctx, e.ID, maxShown)
		if err != nil {
			return nil, err
		}
		if size > maxShown || longestLine(content) > maxLine {
			p.Whole, p.Meta = "too large to show", f.wholeKey()
			return p, nil
		}
		if strings.IndexByte(content[:min(len(content), sniffed)], 0) >= 0 {
			p.Whole, p.Meta = "binary file", f.wholeKey()
			return p, nil
		}
		text[i] = content
	}
	switch {
	case f.Status == Added:
		p.Hunks = allLines('+', text[1])
	case f.Status == Deleted:
		p.Hunks = allLines('-', text[0])
	case f.OldID != f.NewID:
		diff, err := t.Diff(ctx, f.OldID, f.NewID)
		if err != nil {
			return nil, err
		}
		if p.Hunks, err = parseHunks(diff); err != nil {
			return nil, err
		}
	}
	if f.Status == Renamed || f.ModeChanged() || len(p.Hunks) == 0 {
		p.Meta = f.metaKey()
	}
	p.number()
	return p, nil
}

// wholeReason says why a file can be chosen only as a whole, as far as its modes show it.
func wholeReason(f File) string {
	for _, mode := range []string{f.OldMode, f.NewMode} {
		switch mode {
		case repo.ModeLink:
			return "symbolic link"
		case repo.ModeSubmodule:
			return "submodule"
		}
	}
	if f.Status == Retyped {
		return "another type of file"
	}
	return ""
}

func longestLine(s string) (longest int) {
	for line := range strings.SplitSeq(s, "\n") {
		longest = max(longest, len(line))
	}
	return longest
}

// allLines returns the difference of a file to one that does not exist.
func allLines(kind byte, content string) []Hunk {
	lines := splitLines(content)
	if len(lines) == 0 {
		return nil
	}
	h := Hunk{Lines: make([]Line, len(lines))}
	for i, l := range lines {
		h.Lines[i] = Line{Kind: kind, Text: l.text, NoEnd: l.noEnd}
	}
	if kind == '+' {
		h.NewStart, h.NewLines = 1, len(lines)
	} else {
		h.OldStart, h.OldLines = 1, len(lines)
	}
	return []Hunk{h}
}

// textLine is a line of a file. Only the last one may have no newline.
type textLine struct {
	text  string
	noEnd bool
}

func splitLines(content string) (lines []textLine) {
	for line := range strings.Lines(content) {
		text, ended := strings.CutSuffix(line, "\n")
		lines = append(lines, textLine{text, !ended})
	}
	return lines
}

// joinLines returns the content of a file with those lines. A line that has come into the middle gets
// a newline.
func joinLines(lines []textLine) string {
	var b strings.Builder
	for i, l := range lines {
		b.WriteString(l.text)
		if !l.noEnd || i < len(lines)-1 {
			b.WriteByte('\n')
		}
	}
	return b.String()
}

var hunkHeader = lazyregexp.New(`^@@ -([0-9]+)(?:,([0-9]+))? \+([0-9]+)(?:,([0-9]+))? @@`)

// parseHunks parses a unified diff without a header. It relies on the counts of the hunk headers, because
// lines can look like anything.
func parseHunks(diff string) (hunks []Hunk, err error) {
	lines := strings.Split(strings.TrimSuffix(diff, "\n"), "\n")
	if diff == "" {
		return nil, nil
	}
	for len(lines) > 0 {
		f := hunkHeader.FindStringSubmatch(lines[0])
		if f == nil {
			return nil, fmt.Errorf("compare files: git printed %.80q, want a hunk", lines[0])
		}
		h := Hunk{OldStart: count(f[1]), OldLines: count(f[2]), NewStart: count(f[3]), NewLines: count(f[4])}
		if lines, err = h.parse(lines[1:]); err != nil {
			return nil, err
		}
		hunks = append(hunks, h)
	}
	return hunks, nil
}

// count returns a number of a hunk header, which is 1 if it is left out.
func count(s string) int {
	if s == "" {
		return 1
	}
	n, _ := strconv.Atoi(s) // the pattern admits only digits
	return n
}

// parse reads the lines of a hunk and returns those after it.
func (h *Hunk) parse(lines []string) ([]string, error) {
	before, after := h.OldLines, h.NewLines
	for len(lines) > 0 {
		kind, text := byte(' '), ""
		if lines[0] != "" {
			kind, text = lines[0][0], lines[0][1:]
		}
		switch {
		case kind == '\\' && len(h.Lines) > 0:
			h.Lines[len(h.Lines)-1].NoEnd = true
			lines = lines[1:]
			continue
		case before == 0 && after == 0:
			return lines, nil
		case kind == ' ':
			before, after = before-1, after-1
		case kind == '-':
			before--
		case kind == '+':
			after--
		default:
			return nil, fmt.Errorf("compare files: git printed %.80q in a hunk", lines[0])
		}
		h.Lines = append(h.Lines, Line{Kind: kind, Text: text})
		lines = lines[1:]
	}
	if before != 0 || after != 0 {
		return nil, fmt.Errorf("compare files: git's output ends early")
	}
	return nil, nil
}

// number gives the lines their numbers and keys.
func (p *Patch) number() {
	seen := map[string]int{}
	for i := range p.Hunks {
		h := &p.Hunks[i]
		before, after := h.OldStart, h.NewStart
		for j := range h.Lines {
			l := &h.Lines[j]
			if l.Kind != '+' {
				l.Old = before
				before++
			}
			if l.Kind != '-' {
				l.New = after
				after++
			}
			switch l.Kind {
			case '+':
				p.Added++
			case '-':
				p.Removed++
			default:
				continue
			}
			at := fmt.Sprintf("%c%q\n%q\n%q", l.Kind, h.text(j-1), l.Text, h.text(j+1))
			l.Key = makeKey("line", p.Path, at, strconv.Itoa(seen[at]))
			seen[at]++
		}
	}
}

// text returns a line of the hunk with its kind, "" beyond its ends.
func (h *Hunk) text(i int) string {
	if i < 0 || i >= len(h.Lines) {
		return ""
	}
	return string(h.Lines[i].Kind) + h.Lines[i].Text
}

// metaKey returns the key of a change of name or mode.
func (f File) metaKey() Key { return makeKey("meta", f.Path, f.OldPath, f.OldMode, f.NewMode) }

// wholeKey returns the key of a file that changes as a whole.
func (f File) wholeKey() Key {
	return makeKey("file", f.Path, f.OldPath, f.OldMode, f.OldID, f.NewMode, f.NewID)
}

func makeKey(parts ...string) Key {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", parts))
	return Key(hex.EncodeToString(sum[:16]))
}

// apply returns the old content with the chosen lines changed.
func (p *Patch) apply(old string, chosen func(Key) bool) string {
	var out []textLine
	lines, at := splitLines(old), 0
	for _, h := range p.Hunks {
		start := h.OldStart - 1
		if h.OldLines == 0 {
			start = h.OldStart // the line after which lines were added
		}
		for ; at < start && at < len(lines); at++ {
			out = append(out, lines[at])
		}
		for _, l := range h.Lines {
			if l.Kind != '+' {
				at++
			}
			if l.Kind == ' ' || (l.Kind == '+') == chosen(l.Key) {
				out = append(out, textLine{l.Text, l.NoEnd})
			}
		}
	}
	if at < len(lines) {
		out = append(out, lines[at:]...)
	}
	return joinLines(out)
}
