// Package review is the model of a review: what agents changed, which changes the user chose,
// and how these become commits on a branch of the user's clone.
//
// It reads the commits that were fetched to refs/agents/SESSION/, and never runs anything in a
// guest. In the clone it writes objects, the branch that receives the changes, and one reference
// for each session; it never touches the work tree, the index or the current branch. Marks and
// notes are files below the state directory, and refer to changes by their content, so that they
// survive new commits of the agent.
package review

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// Options describes what to review.
type Options struct {
	Clone    string   // the user's clone
	Dir      string   // directory of the files with marks
	Sources  []Source // at least one; several are attempts at the same prompt
	Branch   string   // receives what lands; "" for review/NAME of the first source
	Paths    []string // only these files and directories; none for all
	MaxFiles int      // that an attempt may change; 0 for the default

	// Fetch brings the agents' latest commits to the clone, and returns the sources with their present
	// results. Refresh calls it; nil if the user does that.
	Fetch func(ctx context.Context) ([]Source, error)
}

// Source is where the changes of an attempt come from.
type Source struct {
	ID      string    // of the session
	Name    string    // of the session, whose commits are in refs/agents/NAME/
	Title   string    // as users name it
	Parent  string    // id of the session that it was forked from, or ""
	Base    repo.Base // what the agent started from
	Results []lifecycle.Result
}

// Status is how an agent changed a file.
type Status byte

// How files change.
const (
	Added    Status = 'A'
	Modified Status = 'M'
	Deleted  Status = 'D'
	Renamed  Status = 'R'
	Retyped  Status = 'T' // a file became a link, a directory's submodule, or the reverse
)

// File is a file that an attempt changed.
type File struct {
	Path    string `json:"path"`
	OldPath string `json:"old_path,omitempty"` // only of a renamed file
	Status  Status `json:"status"`
	OldMode string `json:"old_mode,omitempty"` // as git prints it, "100644"; "" if the file did not exist
	NewMode string `json:"new_mode,omitempty"`
	OldID   string `json:"old_id,omitempty"` // of the content
	NewID   string `json:"new_id,omitempty"`
}

// ModeChanged reports whether the file became executable, or ceased to be.
func (f File) ModeChanged() bool {
	return f.OldMode != "" && f.NewMode != "" && f.OldMode != f.NewMode && f.Status != Retyped
}

// Key identifies a change by its content and its surroundings: 128 bits of a hash, so that an agent cannot
// make two changes with the same key.
type Key string

// Patch is the difference of one file.
type Patch struct {
	File
	// Whole says why the file can be chosen only as a whole: "binary file", "symbolic link",
	// "too large to show". It is "" if its lines can be chosen. There are no hunks otherwise.
	Whole string
	// Meta is the key of the change of name or mode, and of the creation or removal of an empty
	// file. It is "" if there is none. It is chosen independently of the lines.
	Meta           Key
	Hunks          []Hunk
	Added, Removed int // lines
}

// Hunk is a group of changed lines with the unchanged lines around them.
type Hunk struct {
	OldStart, OldLines int
	NewStart, NewLines int
	Lines              []Line
}

// Keys returns the keys of the hunk's changed lines.
func (h Hunk) Keys() []Key {
	var keys []Key
	for _, l := range h.Lines {
		if l.Key != "" {
			keys = append(keys, l.Key)
		}
	}
	return keys
}

// Keys returns the keys of all changes of the file.
func (p *Patch) Keys() []Key {
	var keys []Key
	if p.Meta != "" {
		keys = append(keys, p.Meta)
	}
	for _, h := range p.Hunks {
		keys = append(keys, h.Keys()...)
	}
	return keys
}

// Line is a line of a hunk. Its text comes from the agent: it may hold anything but a newline.
type Line struct {
	Kind     byte   // ' ', '-' or '+'
	Text     string // without the newline at its end, but with a carriage return
	NoEnd    bool   // the file ends here without a newline
	Old, New int    // line numbers, 0 where the line does not exist
	Key      Key    // of a changed line; "" for the others
}

// Mark is how much of a file was chosen.
type Mark int

// How much of a file was chosen. A file that the agent has changed since counts as partly
// chosen until its patch is read.
const (
	None Mark = iota
	Part
	All
)

// Target is what a note is about. It is bound when the user begins to type, and a later refresh
// does not move it.
type Target struct {
	Path    string `json:"path"`
	Line    int    `json:"line,omitempty"`    // in the agent's version, or in the old one if Removed; 0 for the file
	Removed bool   `json:"removed,omitempty"` // the line is one that the agent removed
	Quote   string `json:"quote,omitempty"`   // the text of the line
}

// Note is a remark of the user for the agent.
type Note struct {
	ID string `json:"id"`
	Target
	Text string    `json:"text"`
	At   time.Time `json:"at"`
	Sent time.Time `json:"sent,omitzero"` // zero until the agent has it
}

// LandRequest asks to turn what was chosen into commits.
type LandRequest struct {
	Message string   // "" for DefaultMessage
	Branch  string   // "" for that of the review
	Paths   []string // land these files and directories as a whole, instead of what was marked
	// Findings that the user saw and accepted. Any other finding ends the landing.
	Accept      []Finding
	Unchecked   bool // do not look for secrets and large files
	Resolutions []Resolution
}

// Landed is what a landing did. It has content even if the landing failed after a part of it.
type Landed struct {
	Branch  string         `json:"branch"`
	Tip     string         `json:"tip"` // commit of the branch
	Message string         `json:"message,omitempty"`
	Commits []LandedCommit `json:"commits"`
}

// LandedCommit is a commit with what was chosen of one attempt.
type LandedCommit struct {
	Session string   `json:"session"` // name
	Commit  string   `json:"commit"`  // "" if the branch had all of it already
	Files   []string `json:"files"`
}

// Finding is a reason not to land a change. It never holds the secret itself.
type Finding struct {
	ID      string `json:"id"` // the same finding has the same id
	Session string `json:"session"`
	Path    string `json:"path"`
	Line    int    `json:"line,omitempty"`
	Rule    string `json:"rule"` // of gitleaks, or "large-file"
	What    string `json:"what"` // in words
}

// FindingsError reports findings that the user has not accepted. Nothing of the attempt
// landed.
type FindingsError struct{ Findings []Finding }

// Conflict is a file that both the branch and the agent changed, in ways that cannot be
// combined.
type Conflict struct {
	Attempt int    `json:"-"`
	Session string `json:"session"`
	Path    string `json:"path"`
	// The versions of the file: before both changes, on the branch, and as chosen. A version
	// that does not exist is the zero value.
	Base   repo.Entry `json:"base,omitzero"`
	Ours   repo.Entry `json:"ours,omitzero"`
	Theirs repo.Entry `json:"theirs,omitzero"`
	Why    string     `json:"why,omitempty"` // set if a merge tool cannot resolve it
}

// ConflictError reports that an attempt's changes do not fit the branch. Nothing of that attempt
// landed.
type ConflictError struct{ Conflicts []Conflict }

// CheckedOutError reports that the branch is checked out. Nothing landed.
type CheckedOutError struct{ Branch, Dir string }

// Resolution is the content that the user gave to a file with a conflict. It counts only for
// that conflict.
type Resolution struct {
	Conflict
	Result repo.Entry
}

// DefaultMessage returns the message of a landing for which the user typed none.
func (w *Work) DefaultMessage() string { return "Land the work of " + w.Attempts()[0].source.Name }

// Open reads what the attempts changed and have landed.
func Open(ctx context.Context, o Options) (*Work, error) { return open(ctx, o) }

// Error names the first finding.
func (e *FindingsError) Error() string {
	first := e.Findings[0]
	place := printable(first.Path)
	if first.Line > 0 {
		place += fmt.Sprintf(":%d", first.Line)
	}
	if n := len(e.Findings); n > 1 {
		return fmt.Sprintf("landing stopped by %d findings, first %s: %s", n, place, first.What)
	}
	return fmt.Sprintf("landing stopped by 1 finding: %s: %s", place, first.What)
}

// Error names the first file.
func (e *ConflictError) Error() string {
	first := printable(e.Conflicts[0].Path)
	if n := len(e.Conflicts); n > 1 {
		return fmt.Sprintf("%d files conflict with the branch, including %s", n, first)
	}
	return "1 file conflicts with the branch: " + first
}

// Error names the branch.
func (e *CheckedOutError) Error() string {
	return fmt.Sprintf("cannot land on branch %s: it is checked out in %s, whose files would become outdated", e.Branch, printable(e.Dir))
}
