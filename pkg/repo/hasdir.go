package repo

import (
	"context"
	"fmt"
	"strings"
)

// MayHaveDir reports whether the commit to be checked out has a directory of that
// name, or an entry that the checkout could turn into one: a submodule or a
// symbolic link.
func (s Source) MayHaveDir(ctx context.Context, name string) (bool, error) {
	o, err := examine(ctx, s)
	if err != nil || o.commit == "" {
		return false, err
	}
	git := hostGit{dir: s.Dir}
	at := ""
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." {
			continue
		}
		at = strings.TrimPrefix(at+"/"+part, "/")
		entry, err := git.output(ctx, "--literal-pathspecs", "ls-tree", "--full-tree", o.commit, "--", at)
		if err != nil {
			return false, fmt.Errorf("find %s: %w", name, err)
		}
		mode, _, _ := strings.Cut(entry, " ")
		switch mode {
		case "040000":
		case "160000", "120000":
			return true, nil
		default:
			return false, nil
		}
	}
	return true, nil
}
