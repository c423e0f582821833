package guestclient

import (
	"testing"
	"testing/fstest"
)

func TestStepLines(t *testing.T) {
	s, err := newStepLines(fstest.MapFS{
		"10-base.sh":   {Data: []byte("#!/bin/bash\n# The packages that all need. And more.\necho\n")},
		"20-docker.sh": {Data: []byte("#!/bin/bash\necho\n")},
		"30-node.sh":   {Data: []byte("#!/bin/bash\n# Node and npm.\n")},
		"run.sh":       {Data: []byte("#!/bin/bash\n# Runs steps.\n")},
		"lib.sh":       {},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ line, want string }{
		{"before any step", "before any step"},
		{"step 10-base start 0", "step 1 of 3, 10-base: The packages that all need"},
		{"refreshing package lists", "step 1 of 3, 10-base: refreshing package lists"},
		{"step 10-base done 41", "step 1 of 3, 10-base: done in 41s"},
		{"step 20-docker skip 0", "step 2 of 3, 20-docker: nothing to do"},
		{"step 30-node start 0", "step 3 of 3, 30-node: Node and npm"},
		{"step 99-unknown start 0", "step 3 of 3, 30-node: step 99-unknown start 0"},
		{"step 30-node failed 3", "step 3 of 3, 30-node: failed after 3s"},
	} {
		if got := s.line(c.line); got != c.want {
			t.Errorf("line(%q) = %q, want %q", c.line, got, c.want)
		}
	}
}
