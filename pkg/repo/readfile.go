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

// Entries describes files and directories of the commit to be checked out, one line for each that
// exists: mode, type, object id and path. The text changes whenever one of them does.
func (s Source) Entries(ctx context.Context, paths ...string) (string, error) {
	s, err := s.Resolve(ctx)
	if err != nil || s.Commit == "" || len(paths) == 0 {
		return "", err
	}
	out, err := hostGit{dir: s.Dir}.output(ctx, append([]string{"ls-tree", "--full-tree", s.Commit, "--"}, paths...)...)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", strings.Join(paths, ", "), err)
	}
	return out, nil
}
