package repo

import (
	"context"
	"fmt"
	"path"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Reclone makes the directory dst, in which another session left the files of a checkout, a checkout of
// src. These files stay; those that are settings, or lie in directories that are, become those of src.
// old is the git directory that the session left, which is hostile; its branches and its current branch
// come along if git can read them. Without that directory, Reclone is a Push. It may be repeated.
func Reclone(ctx context.Context, g Guest, src Source, dst Checkout, old string, settings []string, p Progress) (Base, error) {
	dir := path.Clean(dst.Dir)
	_, err := probeCheckout(ctx, g, dst)
	if fail.CodeOf(err) != fail.Conflict { // there is a checkout, or nothing
		if err != nil {
			return Base{}, err
		}
		return Push(ctx, g, src, dst, p)
	}
	var warnings []string
	finish := func(tmp string) (err error) {
		warnings, err = reported(ctx, g, command(recloneScript, append([]string{tmp, dir, old}, settings...)...), p)
		return err
	}
	base, err := transfer(ctx, g, src, dir, finish, p)
	if err != nil {
		return Base{}, fmt.Errorf("replace the repository of an earlier session: %w", err)
	}
	base.Warnings = slices.Concat(warnings, extras(ctx, g, dir, p))
	return base, context.Cause(ctx)
}
