package repo

import (
	"context"
	"fmt"
	"strings"
)

// ReadFile returns a file as committed in the commit to be checked out. ok is false
// if the file does not exist or is not a regular file. More than limit bytes are an
// error.
func (s Source) ReadFile(ctx context.Context, name string, limit int) (text []byte, ok bool, err error) {
	git := hostGit{dir: s.Dir}
	// The file may narrow a policy, so report its absence only when it is certain.
	if s, err = s.Resolve(ctx); err != nil || s.Commit == "" {
		return nil, false, err // no commit yet
	}
	entry, err := git.output(ctx, "ls-tree", "-l", "--full-tree", s.Commit, "--", name)
	if err != nil {
		return nil, false, fmt.Errorf("find %s: %w", name, err)
	}
	// MODE SP TYPE SP OBJECT SP SIZE TAB PATH
	fields := strings.Fields(entry)
	if len(fields) < 5 || fields[1] != "blob" || !strings.HasPrefix(fields[0], "100") {
		return nil, false, nil
	}
	var size int
	if _, err := fmt.Sscan(fields[3], &size); err != nil || size > limit {
		return nil, false, fmt.Errorf("%s has %s bytes, over the limit of %d", name, fields[3], limit)
	}
	out, err := git.output(ctx, "cat-file", "blob", fields[2])
	return []byte(out), err == nil, err
}

// Entries returns the mode and object id of each file and directory that exists in the commit to be
// checked out, by path. They change whenever the content does.
func (s Source) Entries(ctx context.Context, paths ...string) (map[string]string, error) {
	s, err := s.Resolve(ctx)
	if err != nil || s.Commit == "" || len(paths) == 0 {
		return nil, err
	}
	out, err := hostGit{dir: s.Dir}.output(ctx, append([]string{"ls-tree", "-z", "--full-tree", s.Commit, "--"}, paths...)...)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", strings.Join(paths, ", "), err)
	}
	entries := map[string]string{}
	for line := range strings.SplitSeq(out, "\x00") {
		// MODE SP TYPE SP OBJECT TAB PATH
		is, path, _ := strings.Cut(line, "\t")
		if fields := strings.Fields(is); len(fields) == 3 {
			entries[path] = fields[0] + " " + fields[2]
		}
	}
	return entries, nil
}
