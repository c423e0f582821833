package repo

import (
	"bytes"
	"context"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Changes is the output of Diff in structured form. Names and text come from the
// guest and are escaped as in Diff, so that they cannot control a terminal. The
// patch is for reading; Fetch collects the work itself.
type Changes struct {
	Base  string   `json:"base,omitempty"` // "" for a repository without commits
	Files []Change `json:"files"`
	Patch string   `json:"patch"`
}

// Change is one file of Changes.
type Change struct {
	Path    string `json:"path"`
	From    string `json:"from,omitempty"` // previous path
	Status  string `json:"status"`         // "added", "deleted", "modified", "renamed", "copied", "type_changed", "unmerged"
	Added   int64  `json:"added"`          // lines; 0 in a binary file
	Deleted int64  `json:"deleted"`
	Binary  bool   `json:"binary,omitempty"`
}

// maxChanges bounds the output that a guest sends for Changes. Memory holds it
// several times: as sent, escaped, and as JSON.
const maxChanges = 16 << 20

// statuses maps the letters of git diff --raw.
var statuses = map[byte]string{
	'A': "added", 'C': "copied", 'D': "deleted", 'M': "modified", 'R': "renamed", 'T': "type_changed", 'U': "unmerged",
}

// Compare returns the changes in the guest since base, as Diff does.
func Compare(ctx context.Context, g Guest, dir string, base Base, opts DiffOptions) (Changes, error) {
	if opts.MaxBytes <= 0 {
		opts.MaxBytes = maxChanges
	}
	var out bytes.Buffer
	if err := opts.compare(ctx, g, dir, base, []string{"-z", "--raw", "--numstat", "--patch"}, &out); err != nil {
		return Changes{}, err
	}
	c, err := parseChanges(out.String())
	c.Base = base.Commit
	return c, err
}

// parseChanges parses the output of git diff -z --raw --numstat --patch: one record
// per file, the line counts of each in the same order, an empty field, and the
// patch. Fields end in NUL, and a renamed file has two names.
func parseChanges(out string) (Changes, error) {
	c := Changes{Files: []Change{}}
	garbled := fail.New(fail.Failure, "parse the guest's list of changes: unexpected format").WithHint("agent-sessionizer diff SESSION")
	next := func() (field string, ok bool) {
		field, out, ok = strings.Cut(out, "\x00")
		return field, ok
	}
	for strings.HasPrefix(out, ":") {
		record, _ := next()
		letter := record[strings.LastIndexByte(record, ' ')+1:]
		if letter == "" || statuses[letter[0]] == "" {
			return c, garbled
		}
		f := Change{Status: statuses[letter[0]]}
		from := ""
		if letter[0] == 'R' || letter[0] == 'C' {
			from, _ = next()
		}
		path, ok := next()
		if !ok {
			return c, garbled
		}
		f.Path, f.From = spell(path), spell(from)
		c.Files = append(c.Files, f)
	}
	for i := range c.Files {
		f := &c.Files[i]
		counts, ok := next()
		fields := strings.SplitN(counts, "\t", 3)
		if !ok || len(fields) != 3 {
			return c, garbled
		}
		if fields[2] == "" { // two names follow
			next()
			next()
		}
		if f.Binary = fields[0] == "-" && fields[1] == "-"; f.Binary {
			continue
		}
		var err1, err2 error
		f.Added, err1 = strconv.ParseInt(fields[0], 10, 64)
		f.Deleted, err2 = strconv.ParseInt(fields[1], 10, 64)
		if err1 != nil || err2 != nil || f.Added < 0 || f.Deleted < 0 {
			return c, garbled
		}
	}
	if len(c.Files) > 0 {
		if empty, ok := next(); !ok || empty != "" {
			return c, garbled
		}
	}
	if strings.ContainsRune(out, 0) {
		return c, garbled
	}
	c.Patch = spell(out)
	return c, nil
}

// spell escapes text as printer does.
func spell(text string) string {
	var out bytes.Buffer
	p := newPrinter(&out, false)
	// Writes to a buffer do not fail.
	_, _ = p.Write([]byte(text))
	_ = p.close()
	return out.String()
}
