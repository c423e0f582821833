package repo

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// WorkState describes the work that exists only in a guest, as reported by the
// guest.
type WorkState struct {
	Head       string   `json:"head,omitempty"`
	Branch     string   `json:"branch,omitempty"` // "" if detached
	Branches   []Branch `json:"branches"`         // those with commits of their own
	Ahead      int      `json:"ahead"`            // commits neither pushed, nor fetched, nor in the base
	Dirty      int      `json:"dirty"`            // tracked files with uncommitted changes
	Untracked  int      `json:"untracked"`
	Stashes    int      `json:"stashes"`
	Submodules int      `json:"submodules"`            // commits in submodules that none of their remotes has
	InProgress []string `json:"in_progress,omitempty"` // "rebase", "merge", …
}

// Branch is a guest's branch with commits that exist nowhere else.
type Branch struct {
	Name  string `json:"name"`
	Tip   string `json:"tip"`
	Ahead int    `json:"ahead"`
}

// Clean reports whether destroying the guest would lose nothing.
func (w WorkState) Clean() bool {
	return w.Ahead == 0 && w.Dirty == 0 && w.Untracked == 0 && w.Stashes == 0 && w.Submodules == 0 && len(w.InProgress) == 0
}

// Summary describes the work that would be lost, for display.
func (w WorkState) Summary() string {
	var parts []string
	add := func(n int, one, many string) {
		switch {
		case n == 1:
			parts = append(parts, "1 "+one)
		case n > 1:
			parts = append(parts, fmt.Sprintf("%d %s", n, many))
		}
	}
	add(w.Ahead, "commit neither pushed nor fetched", "commits neither pushed nor fetched")
	add(w.Dirty, "changed file", "changed files")
	add(w.Untracked, "untracked file", "untracked files")
	add(w.Stashes, "stash", "stashes")
	add(w.Submodules, "unpushed commit in a submodule", "unpushed commits in submodules")
	for _, s := range w.InProgress {
		parts = append(parts, "a "+s+" in progress")
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

const maxCount = 1 << 40 // upper bound of every count from a guest

// Work asks the guest which work would be lost if it were destroyed. known are
// commits that the host has (see Known); base is the guest's starting point.
func Work(ctx context.Context, g Guest, dir string, base Base, known ...string) (WorkState, error) {
	if err := checkDir(dir); err != nil {
		return WorkState{}, err
	}
	var have bytes.Buffer
	for _, id := range append(slices.Clone(known), base.Commit) {
		if objectID.MatchString(id) {
			fmt.Fprintln(&have, id)
		}
	}
	out, err := g.Output(ctx, command(workScript, dir), &have, maxReply)
	if err != nil {
		return WorkState{}, fmt.Errorf("inspect the guest's work: %w", err)
	}
	return parseWork(string(out))
}

func parseWork(out string) (WorkState, error) {
	w := WorkState{Branches: []Branch{}}
	counts := map[string]*int{
		"ahead": &w.Ahead, "dirty": &w.Dirty, "untracked": &w.Untracked, "stashes": &w.Stashes, "submodules": &w.Submodules,
	}
	bad := func(line string) error {
		return fail.New(fail.Failure, "the guest's report of its work is invalid: %q", clip(line))
	}
	ended := false
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		if ended {
			return WorkState{}, bad(line)
		}
		key, value, _ := strings.Cut(line, " ")
		switch n := counts[key]; {
		case n != nil:
			v, err := number(value)
			if err != nil {
				return WorkState{}, bad(line)
			}
			*n = v
		case key == "head" && objectID.MatchString(value):
			w.Head = value
		case key == "branch":
			w.Branch = clip(value)
		case key == "progress" && len(w.InProgress) < 16:
			if v := clip(value); !slices.Contains(w.InProgress, v) {
				w.InProgress = append(w.InProgress, v)
			}
		case key == "ref" && len(w.Branches) < 1000:
			f := strings.SplitN(value, " ", 3)
			if len(f) != 3 || !objectID.MatchString(f[0]) {
				return WorkState{}, bad(line)
			}
			v, err := number(f[1])
			if err != nil {
				return WorkState{}, bad(line)
			}
			if v > 0 {
				w.Branches = append(w.Branches, Branch{Name: clip(f[2]), Tip: f[0], Ahead: v})
			}
		case key == "end" && value == "":
			ended = true
		default:
			return WorkState{}, bad(line)
		}
	}
	if !ended {
		return WorkState{}, bad("the end is missing")
	}
	return w, nil
}

func number(s string) (int, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil || n < 0 || n > maxCount {
		return 0, fmt.Errorf("invalid count %q", clip(s))
	}
	return int(n), nil
}
