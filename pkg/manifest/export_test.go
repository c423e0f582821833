package manifest

import "reflect"

// Same reports whether two tasks are equal except for where they were parsed from.
func Same(a, b *Task) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, y := *a, *b
	x.source, y.source = nil, nil
	return reflect.DeepEqual(x, y)
}
