package repo

import (
	"io"
	"strings"
	"testing"
)

func TestHead(t *testing.T) {
	s := start(t)
	at := func(want Base) {
		t.Helper()
		got, err := Head(t.Context(), s.g, s.g.dir())
		if err != nil || got.Commit != want.Commit || got.Branch != want.Branch {
			t.Errorf("Head = %+v, %v, want %+v", got, err, want)
		}
	}
	at(s.base)
	id := s.agent(t, "git switch -qc agent/x && git commit -q --allow-empty -m one && git rev-parse HEAD")
	at(Base{Commit: id, Branch: "agent/x"})
	s.agent(t, "git switch -q --detach")
	at(Base{Commit: id})
	s.agent(t, "git switch -q --orphan new")
	at(Base{Branch: "new"})
	s.agent(t, "rm -rf .git")
	if got, err := Head(t.Context(), s.g, s.g.dir()); err == nil {
		t.Errorf("Head without a repository = %+v, nil, want an error", got)
	}
}

func TestHeadOfALiar(t *testing.T) {
	id := strings.Repeat("ab", 20)
	for name, answer := range map[string]string{
		"nothing": "", "half": id + "\n", "an option": "--output=x\nmain\n", "a short one": "abab\nmain\n",
	} {
		l := &liar{answer: map[string]func(io.Writer){headScript: says(answer)}}
		if got, err := Head(t.Context(), l, "/x/y"); err == nil {
			t.Errorf("Head with %s = %+v, nil, want an error", name, got)
		}
	}
	l := &liar{answer: map[string]func(io.Writer){headScript: says(id + "\n\x1b[31mred\nmore\n")}}
	if got, err := Head(t.Context(), l, "/x/y"); err != nil || got.Commit != id || strings.ContainsAny(got.Branch, "\x1b\n") {
		t.Errorf("Head = %+v, %v, want commit %s, a branch without control bytes", got, err, id)
	}
}
