package taskrun

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const outSub = "submodule" // plus a number: the patch of a submodule, in the directory of a collection

// submodules collects a patch of each submodule, from the commit recorded at base,
// and returns the untracked files there. The patch of the enclosing repository
// contains only the ids of the submodules' commits.
func (c *collector) submodules(ctx context.Context, below, base string, depth int) (untracked []string, err error) {
	found, err := taskGit{dir: filepath.Join(c.ask.Dir, below), scratch: c.dir}.submodules(ctx, base)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("list the submodules of %q: %w", below, err)
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		base, name := found[name], path.Join(below, name)
		git := taskGit{dir: filepath.Join(c.ask.Dir, name), scratch: c.dir}
		patched, err := c.patch(ctx, git, base, outSub+strconv.Itoa(c.subs), guestproto.SubmodulesDir+"/"+guestproto.EscapeName(name)+".patch")
		if err != nil {
			return nil, err
		}
		c.subs++
		names, more, err := c.untracked(ctx, git, !patched)
		if err != nil {
			return nil, err
		}
		c.skipped += more
		if patched && depth < maxNests {
			inner, err := c.submodules(ctx, name, base, depth+1)
			if err != nil {
				return nil, err
			}
			untracked = append(untracked, inner...)
		}
		for _, n := range names {
			untracked = append(untracked, name+"/"+n)
		}
	}
	return untracked, nil
}

// submodules returns the existing submodules that the repository records, now or at
// base. It maps each to the commit recorded at base, "" for none.
func (g taskGit) submodules(ctx context.Context, base string) (map[string]string, error) {
	found := map[string]string{}
	record := func(entry string, known bool) {
		header, name, _ := strings.Cut(entry, "\t") // mode [type] commit [stage]
		f := strings.Fields(header)
		if len(f) < 3 || f[0] != "160000" || !filepath.IsLocal(name) || len(found) > maxSubmodules {
			return
		}
		if _, err := os.Lstat(filepath.Join(g.dir, name, ".git")); err != nil {
			return
		}
		found[name] = ""
		if known {
			found[name] = f[2]
		}
	}
	err := g.run(ctx, &sys.Entries{Use: func(e string) { record(e, false) }}, "ls-files", "--stage", "-z")
	if err == nil && base != "" {
		err = g.run(ctx, &sys.Entries{Use: func(e string) { record(e, true) }}, "ls-tree", "-r", "-z", base)
	}
	if err == nil && len(found) > maxSubmodules {
		err = fmt.Errorf("there are more than %d submodules", maxSubmodules)
	}
	return found, err
}
