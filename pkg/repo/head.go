package repo

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

//go:embed guest/head.sh
var headScript string

// Head returns what is checked out in a guest now, as reported by the guest.
func Head(ctx context.Context, g Guest, dir string) (Base, error) {
	if err := checkDir(dir); err != nil {
		return Base{}, err
	}
	out, err := g.Output(ctx, command(headScript, dir), nil, maxText)
	if err != nil {
		return Base{}, fmt.Errorf("read the guest's HEAD: %w", err)
	}
	commit, branch, ok := strings.Cut(strings.TrimSuffix(string(out), "\n"), "\n")
	if !ok || commit != "" && !objectID.MatchString(commit) {
		return Base{}, fail.New(fail.Failure, "parse the guest's HEAD: unexpected output %q", clip(string(out)))
	}
	return Base{Commit: commit, Branch: clip(branch)}, nil
}
